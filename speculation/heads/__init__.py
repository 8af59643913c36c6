"""Drafting heads: small networks over the target's hidden states, and the files they come in.

``file`` reads what every kind of heads has in common, a module for each kind its weights; ``tree``
knows which candidates of several heads are worth a row. Nothing here knows of drafting or texts.
"""
