"""Facts of the wire: real uvicorn in front, the router's own httpx pool, and workers that listen on real sockets."""
