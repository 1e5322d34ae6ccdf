# Two images from one file:
#   docker build --target cpu -t groupgrad:cpu .
#   docker build --target cuda -t groupgrad:cuda .
# Extras: --build-arg EXTRAS=math,peft,view,vlm. The compiler builds the CPU kernels on first use, and Triton's on a GPU.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS base
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
WORKDIR /opt/groupgrad
COPY constraints.txt pyproject.toml README.md LICENSE ./

FROM base AS cpu
ARG EXTRAS=math,peft,view
# An extra index, since that of the CPU's wheels lacks most releases of other packages; 2.13.0+cpu is above 2.13.0.
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
RUN pip install --constraint constraints.txt torch
COPY src src
RUN pip install --constraint constraints.txt ".[${EXTRAS}]" \
    && useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /home/trainer
ENTRYPOINT ["groupgrad"]
CMD ["--help"]

# PyTorch's wheels on the package index bring CUDA along; the host needs a driver and NVIDIA's container toolkit.
FROM base AS cuda
ARG EXTRAS=math,peft,quant,deepspeed,view
RUN pip install --constraint constraints.txt torch
COPY src src
RUN pip install --constraint constraints.txt ".[${EXTRAS}]" \
    && useradd --create-home --uid 1000 trainer
USER 1000
WORKDIR /home/trainer
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENTRYPOINT ["groupgrad"]
CMD ["--help"]
