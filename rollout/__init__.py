"""Actors: from a task and a policy to events."""
