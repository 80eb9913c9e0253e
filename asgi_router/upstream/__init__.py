"""How bytes travel between client and worker."""
