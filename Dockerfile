# syntax=docker/dockerfile:1
# Two images: `server` (all that gpubroker can do; runs on Ray) and `gateway` (without Ray: for `gpubroker gateway`).
#   docker build --target server --tag gpubroker .
#   docker build --target gateway --tag gpubroker-gateway .
# Build with the Python minor version of your clients: functions pickled by another one are refused.
ARG PYTHON=3.11
ARG UV=0.13.9

FROM ghcr.io/astral-sh/uv:${UV} AS uv

FROM python:${PYTHON}-slim AS build
COPY --from=uv /uv /usr/local/bin/uv
# Compile now: otherwise every start of a Ray process compiles again.
ENV UV_COMPILE_BYTECODE=1 UV_LINK_MODE=copy UV_NO_CACHE=1 UV_PYTHON_DOWNLOADS=never
WORKDIR /app
COPY pyproject.toml uv.lock ./
COPY client/pyproject.toml client/

# Dependencies, which a change of our sources leaves as they are, in the build's cache and as a layer of the image.
FROM build AS gateway-dependencies
RUN uv sync --frozen --no-default-groups --no-install-workspace --extra oidc --extra postgres --extra triton

FROM build AS server-dependencies
RUN uv sync --frozen --no-default-groups --no-install-workspace --all-extras

# Our two packages alone, in an environment of the same path: its files are laid over those of the dependencies.
FROM build AS packages
COPY README.md LICENSE ./
COPY client client
COPY service service
COPY migrations migrations
RUN uv venv && uv pip install --no-deps ./client .

# A new volume gets the owner of the directory that it is mounted on, so those for volumes are here: state, Ray's files.
FROM python:${PYTHON}-slim AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --home-dir /var/lib/gpubroker --no-create-home --shell /usr/sbin/nologin gpubroker \
    && install --directory --owner gpubroker --group gpubroker --mode 0700 /var/lib/gpubroker /tmp/ray \
    && install --directory /srv/code
COPY LICENSE /usr/share/doc/gpubroker/LICENSE
ENV PATH=/app/.venv/bin:$PATH \
    GPUBROKER_DATA_DIR=/var/lib/gpubroker \
    GPUBROKER_HOST=0.0.0.0 \
    GPUBROKER_LOG_FORMAT=json
USER 10001:10001
# Where tasks import their modules from, unless task_path says otherwise.
WORKDIR /srv/code
VOLUME /var/lib/gpubroker
EXPOSE 8470
HEALTHCHECK --interval=15s --timeout=10s --start-period=60s CMD ["gpubroker", "health"]
# Ends the processes that others leave behind, also where it isn't the first process (-s).
ENTRYPOINT ["tini", "-s", "--", "gpubroker"]

FROM base AS gateway
COPY --from=gateway-dependencies /app/.venv /app/.venv
COPY --from=packages /app/.venv /app/.venv
CMD ["gateway"]

FROM base AS server
COPY --from=server-dependencies /app/.venv /app/.venv
COPY --from=packages /app/.venv /app/.venv
CMD ["serve"]
