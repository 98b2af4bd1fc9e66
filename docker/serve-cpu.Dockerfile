# nnsight-serve on vLLM's CPU build, for trying out. From the root of the repository:
#
#   docker build -f docker/serve-cpu.Dockerfile -t nnsight-serve-cpu .
#
# BuildKit is not needed. docs/docker.md tells how to run it, and what the build arguments are for.

# An image of Debian's with pip and the Python that requirements/serve-cpu.txt is resolved for, and with
# Python's headers, since vLLM compiles the model that it is given when it starts.
ARG BASE=python:3.11-slim

# --- the engine and all else that is pinned: the large layer, which our own changes leave alone ---
FROM ${BASE} AS engine
# More options for pip. What is given here does not reach the image that is kept.
ARG PIP_ARGS=""
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY requirements/serve-cpu.txt /build/
# torch goes first and alone, as in the Makefile.
# hadolint ignore=SC2086
RUN python3 -m venv --without-pip /opt/nnsight \
    && into="python3 -m pip --python /opt/nnsight/bin/python" \
    && torch="$(grep '^torch==' /build/serve-cpu.txt)" \
    && { $into install --no-deps $PIP_ARGS "$torch" \
        || $into install --no-deps $PIP_ARGS --index-url "$TORCH_INDEX" "$torch"; } \
    && $into install --no-deps $PIP_ARGS -r /build/serve-cpu.txt

# --- our packages, from wheels ---
FROM engine AS packages
COPY LICENSE /build/
COPY packages /build/packages
WORKDIR /build/packages
# hadolint ignore=SC2086
RUN python3 -m pip wheel --no-deps $PIP_ARGS --wheel-dir /build/wheels \
        ./nnsight-core ./nnsight-vllm-worker ./nnsight-serve \
    && python3 -m pip --python /opt/nnsight/bin/python install --no-deps --no-index \
        --prefix /build/installed /build/wheels/*.whl

# --- what is kept ---
FROM ${BASE}
ARG BASE
LABEL org.opencontainers.image.title="nnsight-serve-cpu" \
      org.opencontainers.image.description="Serves a model on vLLM's CPU backend; requests may read and edit its inside" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE}"

# The compiler is not left of the build: vLLM takes it at run time.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ libnuma1 \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/*

# Group 0 may write what the user may, so that any other user of that group will do (--user UID:0).
RUN useradd --uid 10001 --gid 0 --create-home --shell /usr/sbin/nologin nnsight \
    && mkdir /cache \
    && chown nnsight:0 /cache \
    && chmod g=u /cache /home/nnsight

COPY --from=engine /opt/nnsight /opt/nnsight
COPY --from=packages /build/installed /opt/nnsight
COPY docker/health.py /opt/nnsight/

# USER stands for the name of a user that /etc/passwd does not know.
ENV PATH=/opt/nnsight/bin:$PATH \
    HOME=/home/nnsight \
    USER=nnsight \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    NNSIGHT_HOST=0.0.0.0 \
    NNSIGHT_PORT=6677

USER 10001:0
WORKDIR /home/nnsight
VOLUME /cache
EXPOSE 6677
STOPSIGNAL SIGTERM
# A large model takes its time to load.
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python3", "/opt/nnsight/health.py"]
ENTRYPOINT ["nnsight-serve"]
CMD ["--help"]
