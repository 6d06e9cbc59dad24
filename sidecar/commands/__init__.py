"""What each command does, as a coroutine that returns an exit code."""
