"""The tests of `asgi_router.upstream`."""
