"""The methods, one file each. They do not import each other."""
