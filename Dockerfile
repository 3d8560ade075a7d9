# Kindly Web Search for a team: Streamable HTTP on port 8000, Chromium included, not root.
#
#   docker build -t kindly . && docker run --cap-add=SYS_ADMIN -p 8000:8000 \
#     -e KINDLY_HTTP_TOKEN=… -e SERPER_API_KEY=… kindly
#
# Chromium's sandbox needs user namespaces, which Docker forbids without the capability; the server itself, which is not
# root, gets no capability by it. Narrower: a seccomp profile that allows clone, setns and unshare.
FROM python:3.13-slim

# tini reaps what Chromium leaves behind when it ends: as process 1 the server would have to.
RUN apt-get update && apt-get install -y --no-install-recommends chromium tini && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE kindly_search.py chrome_worker.py /src/
RUN pip install --no-cache-dir /src && useradd --create-home kindly
USER kindly
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s CMD python -c "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/healthz')"
ENTRYPOINT ["tini", "--", "kindly-web-search-mcp-server"]
CMD ["start-mcp-server", "--http", "--host", "0.0.0.0"]
