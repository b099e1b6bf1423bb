"""The painters of food_mini: dishes, the scene around them, and the processes that render."""
