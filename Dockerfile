# An image that serves a model. It installs a wheel from dist/, which `make wheels` builds:
#
#     make wheels
#     docker build -t moepack .
#     docker run -p 8000:8000 -v /path/to/packed:/model:ro -e MOEPACK_API_KEY=secret moepack
#
# Arguments after the image's name are options of `moepack serve`. TORCH_INDEX names a package index with builds of torch
# without CUDA, which make the image several GB smaller.
FROM python:3.13-slim
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

ARG TORCH_INDEX=
# The wheel itself says which versions of torch it takes.
# hadolint ignore=DL3013
RUN --mount=type=bind,source=dist,target=/dist \
    wheel="$(find /dist -name "moepack-*linux*_$(uname -m).whl" | sort -V | tail -n 1)" && \
    test -n "$wheel" && \
    if [ -n "$TORCH_INDEX" ]; then pip install --no-cache-dir torch --index-url "$TORCH_INDEX"; fi && \
    pip install --no-cache-dir "${wheel}[serve]" && \
    useradd --uid 10001 --create-home moepack

USER 10001
ENV XDG_CACHE_HOME=/tmp/cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=10m --interval=30s --timeout=10s \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["moepack", "serve", "/model", "--host", "0.0.0.0", "--port", "8000"]
