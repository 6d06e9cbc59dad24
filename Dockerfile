# syntax=docker/dockerfile:1
#
# Three images from one file; the last is the default.
#   docker build .                    the sidecar
#   docker build --target trainer .   the demo's trainer: TensorFlow and the readers, no storage client
#   docker build --target seed .      the demo's data set, put into a bucket
#
# All run as 65534:65534 (nobody), need no shell and write nothing but /opt/ml and /tmp, so a read-only root
# file system is fine. Sidecar and trainer share /opt/ml; the same user in both lets the trainer read the
# FIFOs (mode 0640) and write its model, and lets the sidecar clear what an earlier trainer left.
# scripts/check-images builds them without Docker, and runs them.

FROM python:3.13-slim AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY streamer streamer
COPY sidecar sidecar
RUN pip wheel --no-deps --wheel-dir /wheels ./streamer . \
 && python -m venv --without-pip /opt/venv

# By path: a name would ask the package index, which has neither.
# `--build-arg EXTRAS=[index]` adds NumPy (70 MB), for ranks by record over tens of millions of records.
FROM build AS build-sidecar
ARG EXTRAS=""
RUN pip --python /opt/venv/bin/python install /wheels/penstock_readers-*.whl \
      "$(echo /wheels/penstock_sidecar-*.whl)$EXTRAS"

# botocore describes some 400 services; S3 and those that give out credentials are used. C sources are not run.
FROM build-sidecar AS build-small
RUN find /opt/venv/lib/python*/site-packages/botocore/data -mindepth 1 -maxdepth 1 -type d \
      ! -name s3 ! -name sts ! -name sso ! -name sso-oidc ! -name signin -exec rm -r {} + \
 && find /opt/venv -type f \( -name '*.c' -o -name '*.pyx' -o -name '*.pxd' \) -delete

FROM build-sidecar AS build-seed
RUN pip --python /opt/venv/bin/python install "awscrt>=0.27" "numpy>=1.26" "rich>=14"

FROM build AS build-trainer
RUN pip --python /opt/venv/bin/python install "$(echo /wheels/penstock_readers-*.whl)[tensorflow]" "rich>=14"

FROM python:3.13-slim AS runtime
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# The base image has no bytecode of the standard library, and its user cannot write any: each start would compile anew.
RUN python -m compileall -q -x '/(ensurepip|idlelib|lib2to3|pydoc_data|site-packages|test|tkinter|turtledemo)/' \
      "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
# A new named volume at one of these takes over owner and mode.
RUN install --directory --owner=65534 --group=65534 --mode=0750 /opt/ml /run/penstock
USER 65534:65534
STOPSIGNAL SIGTERM

FROM runtime AS seed
LABEL org.opencontainers.image.title="penstock-seed" \
      org.opencontainers.image.description="Puts the demo's data set into a bucket" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build-seed /opt/venv /opt/venv
WORKDIR /opt/demo
COPY examples examples
ENTRYPOINT ["python", "-m", "examples.demo.seed"]

FROM runtime AS trainer
LABEL org.opencontainers.image.title="penstock-trainer" \
      org.opencontainers.image.description="The demo's trainer: reads channels from FIFOs, knows no storage" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build-trainer /opt/venv /opt/venv
WORKDIR /opt/demo
COPY examples examples
ENTRYPOINT ["python", "-m", "examples.demo.train"]

FROM runtime AS sidecar
LABEL org.opencontainers.image.title="penstock" \
      org.opencontainers.image.description="Streams S3 objects into FIFOs for training jobs" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build-small /opt/venv /opt/venv
WORKDIR /
EXPOSE 9781
HEALTHCHECK --interval=30s --start-period=60s --start-interval=1s --timeout=6s --retries=3 CMD ["penstock", "probe"]
ENTRYPOINT ["penstock"]
CMD ["run", "-c", "/etc/penstock/job.yaml"]
