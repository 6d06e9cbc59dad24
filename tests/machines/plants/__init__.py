"""The checkers are checked: bugs that are planted on purpose, and who finds them."""
