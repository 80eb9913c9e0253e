"""The tests of asgi_router, laid out like the package; the tools they share are in `tests.instruments`."""
