# docker build -t paceline . && docker run -p 127.0.0.1:8000:8000 -v paceline:/var/cache/paceline paceline
FROM python:3.13-slim AS native

# The native kernels need a compiler, which the image itself can do without.
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt cmake nanobind ninja scikit-build-core
COPY native native
# An empty folder where there are no kernels for this processor.
RUN mkdir wheels && if [ "$(uname -m)" = x86_64 ]; then pip wheel --no-build-isolation --no-deps -w wheels ./native; fi

FROM python:3.13-slim

# The pinned dependencies first: they change less often than the code.
WORKDIR /opt/paceline
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
COPY --from=native /build/wheels wheels
RUN python -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --constraint constraints.txt . $(find wheels -name '*.whl')

RUN useradd --system --home-dir /var/cache/paceline --create-home paceline
USER paceline
ENV PATH=/opt/paceline/.venv/bin:$PATH \
    XDG_CACHE_HOME=/var/cache/paceline \
    HF_HOME=/var/cache/paceline/hub \
    PACELINE_HOST=0.0.0.0
VOLUME /var/cache/paceline
EXPOSE 8000

HEALTHCHECK --start-period=5m --interval=10s --timeout=5s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

# docker stop sends SIGTERM: running requests end first. Give it time with --stop-timeout.
ENTRYPOINT ["paceline"]
CMD ["serve"]
