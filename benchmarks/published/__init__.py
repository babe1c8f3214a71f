"""Published training steps, and what the planner's cost model says of them."""
