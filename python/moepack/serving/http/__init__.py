"""The protocols of the server, one file each: fields of requests, and answers. `moepack.serving.server` lists them."""
