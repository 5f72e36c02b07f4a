"""Changing the layout of a tensor without changing its value: what a step moves, which steps to take, doing them."""
