"""Running graders: worker processes with deadlines, connections to services."""
