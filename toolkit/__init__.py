"""The commands: parse, call one function, show the result."""
