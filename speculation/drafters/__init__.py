"""One file a method. Drafters import nothing of each other."""
