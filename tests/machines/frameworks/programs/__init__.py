"""The trainers, each a program of one framework, as a user would write it."""
