"""The records of channels: who reads which, and advice about objects that would garble them."""
