# syntax=docker/dockerfile:1
# Build with the Python minor version of your clients: functions pickled by another one are refused.
ARG PYTHON=3.11
ARG UV=0.13.9

FROM ghcr.io/astral-sh/uv:${UV} AS uv

FROM python:${PYTHON}-slim AS build
COPY --from=uv /uv /usr/local/bin/uv
WORKDIR /app
COPY pyproject.toml uv.lock README.md ./
COPY client ./client
COPY service ./service
COPY migrations ./migrations
# Compile now: otherwise every start of a Ray process compiles again.
RUN UV_PYTHON_DOWNLOADS=never uv sync --frozen --all-extras --no-default-groups --no-editable --compile-bytecode

FROM python:${PYTHON}-slim
RUN useradd --create-home --uid 10001 gpubroker \
    && install --directory --owner gpubroker --mode 0700 /var/lib/gpubroker
COPY --from=build --chown=gpubroker:gpubroker /app/.venv /app/.venv
ENV PATH=/app/.venv/bin:$PATH \
    GPUBROKER_DATA_DIR=/var/lib/gpubroker \
    GPUBROKER_LOG_FORMAT=json
USER gpubroker
WORKDIR /home/gpubroker
VOLUME /var/lib/gpubroker
EXPOSE 8470
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8470/healthz', timeout=2)"]
ENTRYPOINT ["gpubroker"]
CMD ["serve"]
