"""What a request costs on its way through a router, side by side with other routers. README.md, "Data path"."""
