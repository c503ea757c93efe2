"""The HTTP server: one file per protocol for the fields of requests and the answers; `server` lists them."""
