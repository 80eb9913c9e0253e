"""What can be seen of the router's work from outside."""
