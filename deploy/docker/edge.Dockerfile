# A member. Build it in the repository's root:
#   docker build -f deploy/docker/edge.Dockerfile -t tacit-edge --build-arg TORCH_INDEX=URL .
#   docker build -f deploy/docker/edge.Dockerfile -t tacit-edge-cuda --build-arg DEVICE=cuda .
# TORCH_INDEX is the index of wheels that PyTorch's installation page names for the device. If it is empty, pip's own
# index is used, whose Linux wheel has CUDA. The build fails if the wheel is for the other device.
ARG PYTHON=3.11.14-slim-bookworm

FROM python:${PYTHON} AS build
ARG DEVICE=cpu
ARG TORCH_INDEX=
WORKDIR /src
COPY pyproject.toml constraints.txt LICENSE ./
RUN python -m venv /opt/tacit
RUN /opt/tacit/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch==2.13.0
RUN /opt/tacit/bin/python -c "import sys, torch; found = 'cuda' if torch.version.cuda else 'cpu'; sys.exit(found != '${DEVICE}' and f'this torch is for {found}, but the image is for ${DEVICE}; set TORCH_INDEX or DEVICE')"
COPY proto proto
COPY secure_agg secure_agg
COPY coordinator coordinator
COPY edge_client edge_client
COPY learning learning
COPY toolkit toolkit
COPY export export
COPY simulation simulation
COPY tacit_api tacit_api
RUN /opt/tacit/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt '.[edge,export]'

FROM python:${PYTHON}
RUN groupadd --system --gid 10002 tacit && useradd --system --uid 10002 --gid 10002 --no-create-home --shell /usr/sbin/nologin tacit
RUN install -d -o 10002 -g 10002 -m 0700 /var/lib/tacit
COPY --from=build /opt/tacit /opt/tacit
# The member sees a GPU if the container engine passes one in. Otherwise the two NVIDIA variables have no effect.
ENV PATH=/opt/tacit/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TACIT_HOME=/var/lib/tacit \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10002:10002
WORKDIR /var/lib/tacit
VOLUME ["/var/lib/tacit"]
STOPSIGNAL SIGTERM
# A member listens on no port, so the check asks whether it can reach its coordinator.
HEALTHCHECK --interval=10m --timeout=60s --start-period=5m --retries=3 CMD ["edge_client", "doctor"]
ENTRYPOINT ["edge_client"]
CMD ["--help"]
