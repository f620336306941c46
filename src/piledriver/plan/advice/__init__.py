"""Advice for a profile: rules over its report, each with the number it rests on and the planner's predicted gain."""
