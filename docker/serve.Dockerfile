# nnsight-serve on a GPU host. From the root of the repository:
#
#   docker build -f docker/serve.Dockerfile -t nnsight-serve .
#
# BuildKit is not needed. docs/docker.md tells how to run it, and what the build arguments are for.

# vLLM's own image of a version that nnsight knows. vLLM's wheel on a plain Python would serve too, but
# not all that vLLM serves: this image also holds the CUDA compiler and the kernels that some models
# and GPUs need, and lets hosts that have it already fetch a few megabytes.
ARG BASE=vllm/vllm-openai:v0.27.1

# --- our packages, from wheels, and what they need beside what BASE has ---
FROM ${BASE} AS packages
# More options for pip. What is given here does not reach the image that is kept.
ARG PIP_ARGS=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY LICENSE /build/
COPY packages /build/packages
WORKDIR /build/packages
# What BASE has stays as it is (the constraints), and a BASE without vLLM is refused here.
# hadolint ignore=SC2086
RUN python3 -m pip wheel --no-deps $PIP_ARGS --wheel-dir /build/wheels \
        ./nnsight-core ./nnsight-vllm-worker ./nnsight-serve \
    && python3 -m pip list --format=freeze >/build/base.txt \
    && python3 -m venv --system-site-packages --without-pip /opt/nnsight \
    && /opt/nnsight/bin/python -c "import importlib.util, sys; \
sys.exit(None if importlib.util.find_spec('vllm') else 'The python3 of BASE has no vLLM.')" \
    && python3 -m pip --python /opt/nnsight/bin/python install $PIP_ARGS \
        --constraint /build/base.txt /build/wheels/*.whl

# --- what is kept ---
FROM ${BASE}
ARG BASE
LABEL org.opencontainers.image.title="nnsight-serve" \
      org.opencontainers.image.description="Serves a model on vLLM; requests may read and edit its inside" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE}"

# Group 0 may write what the user may, so that any other user of that group will do (--user UID:0).
RUN useradd --uid 10001 --gid 0 --create-home --shell /usr/sbin/nologin nnsight \
    && mkdir /cache \
    && chown nnsight:0 /cache \
    && chmod g=u /cache /home/nnsight

COPY --from=packages /opt/nnsight /opt/nnsight
COPY docker/health.py /opt/nnsight/

# USER stands for the name of a user that /etc/passwd does not know.
ENV PATH=/opt/nnsight/bin:$PATH \
    HOME=/home/nnsight \
    USER=nnsight \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton \
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
