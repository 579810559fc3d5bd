# The web server, the sweep and the migrations. It has neither torch nor the sandbox.
FROM python:3.11-slim-bookworm

RUN useradd --system --uid 10001 --home-dir /var/lib/tilegrade --create-home tilegrade
WORKDIR /srv/tilegrade
COPY pyproject.toml README.md constraints-cpu.txt ./
COPY grader grader
COPY workers workers
COPY reference reference
COPY migrations migrations
RUN pip install --no-cache-dir --disable-pip-version-check --constraint constraints-cpu.txt ".[web]"
COPY assignments assignments

ENV TILEGRADE_DATA=/var/lib/tilegrade \
    TILEGRADE_ASSIGNMENTS=/srv/tilegrade/assignments \
    TILEGRADE_HOST=0.0.0.0 \
    PYTHONUNBUFFERED=1
USER tilegrade
EXPOSE 8000
CMD ["tilegrade", "web"]
