# The coordinator, without torch, compiler or root. Build it in the repository's root:
#   docker build -f deploy/docker/coordinator.Dockerfile -t tacit-coordinator .
ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt LICENSE ./
COPY proto proto
COPY secure_agg secure_agg
COPY coordinator coordinator
COPY edge_client edge_client
COPY learning learning
COPY toolkit toolkit
COPY export export
COPY simulation simulation
COPY tacit_api tacit_api
RUN python -m venv /opt/tacit
RUN /opt/tacit/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[coordinator,coordinator-postgres,s3]'
RUN /opt/tacit/bin/python -m compileall -q /opt/tacit/lib

FROM python:${PYTHON}
# No package of the base image uses these ids. Volumes are owned by them.
RUN groupadd --system --gid 10001 tacit && useradd --system --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin tacit
RUN install -d -o 10001 -g 10001 -m 0700 /var/lib/tacit /var/backups/tacit
COPY --from=build /opt/tacit /opt/tacit
ENV PATH=/opt/tacit/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TACIT_DIR=/var/lib/tacit \
    TACIT_LOG_FORMAT=json
USER 10001:10001
WORKDIR /var/lib/tacit
VOLUME ["/var/lib/tacit", "/var/backups/tacit"]
EXPOSE 7440 7441 7442
STOPSIGNAL SIGTERM
# Asks gRPC's health service over TLS; no host name needs to resolve.
HEALTHCHECK --interval=30s --timeout=10s --start-period=60s --retries=3 CMD ["coordinator", "health"]
ENTRYPOINT ["coordinator"]
CMD ["serve"]
