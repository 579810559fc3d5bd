# A worker that grades on an NVIDIA GPU; the driver comes from the host. gcc and the headers are for the launcher that Triton builds.
FROM debian:12-slim

RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        bubblewrap ca-certificates gcc libc6-dev libseccomp2 python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /srv/tilegrade
COPY pyproject.toml README.md constraints-gpu.txt ./
COPY grader grader
COPY workers workers
COPY reference reference
COPY migrations migrations
# an environment that every user may read: candidates run as users of their own
RUN python3 -m venv /opt/tilegrade \
    && /opt/tilegrade/bin/pip install --no-cache-dir --disable-pip-version-check \
        --constraint constraints-gpu.txt ".[worker,gpu]"
COPY assignments assignments

ENV PATH=/opt/tilegrade/bin:$PATH \
    TILEGRADE_DATA=/var/lib/tilegrade \
    TILEGRADE_ASSIGNMENTS=/srv/tilegrade/assignments \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1
# root, so that each candidate gets a user and limits of its own; docker/README.md says what the container may do
CMD ["tilegrade", "worker", "--device", "cuda"]
