# The endpoint alone: no torch. The model is not inside; it is mounted, or SageMaker puts it there.
#
#   docker build -t kd-serve .
#   docker run --rm -p 127.0.0.1:8080:8080 -v "$PWD/runs/vit_food/export:/opt/ml/model:ro" kd-serve serve
#
# SageMaker starts the container as `docker run IMAGE serve`: the folder is /opt/ml/model, the port 8080.
FROM python:3.12.11-slim-bookworm

COPY pyproject.toml README.md LICENSE /src/
# What an endpoint imports, with the oldest versions that pyproject.toml allows. openvino (180 MB): --accept may choose its files.
RUN sed -nE 's/^(openvino = \[| +)"((numpy|pillow|onnxruntime|openvino|starlette|granian|python-multipart|prometheus-client)>=[0-9.,!=]+)".*/\2/p' /src/pyproject.toml > /src/endpoint.txt \
    && pip install --no-cache-dir --requirement /src/endpoint.txt

COPY kd /src/kd
COPY configs /src/configs
# Without its dependencies: training needs torch and timm, answering does not.
RUN pip install --no-cache-dir --no-deps /src && rm -rf /src

# SageMaker's documents expect root; nothing here needs it: the port is above 1024 and the model is only read.
# A number, because Kubernetes cannot tell from a name that a user is not root.
USER 10001:10001
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=2s --start-period=30s \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('SAGEMAKER_BIND_TO_PORT', '8080') + '/ping', timeout=2)"]
# The exec form: SIGTERM reaches the server, which answers what it has accepted and ends with 0.
ENTRYPOINT ["kd-serve"]
CMD ["serve"]
