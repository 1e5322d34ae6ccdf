"""Reads the folders of runs, for the programs that show and compare them."""
