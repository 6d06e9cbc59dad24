"""The relay under every order of events that a seed can draw."""
