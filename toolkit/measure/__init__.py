"""How fast a model translates and what it needs for that: engines in processes of their own that take turns."""
