"""Drafting heads: their forward passes and file formats.

Each kind of heads has a module, with its files. ``kind`` describes how files are recognised,
``load`` loads them, ``file`` has what the formats of this project share, ``converted`` the checks
of llama.cpp's formats, ``tree`` the static trees of Medusa and EAGLE-1.
Nothing here knows about drafters or texts.
"""
