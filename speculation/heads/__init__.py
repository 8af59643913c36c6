"""Drafting heads: their forward passes and file formats.

Each kind of heads has a module, with its files. ``file`` has how files are recognised and what the
formats of this project share, ``converted`` the checks of llama.cpp's formats; ``load`` loads
files. Nothing here knows about drafters or texts.
"""
