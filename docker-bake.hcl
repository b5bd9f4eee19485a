# FedLoom's images (docs/chart.md): docker buildx bake [TARGET...]

# Registry prefix of the images, with a trailing slash.
variable "REGISTRY" {
  default = ""
}

# Version tag and label, as in pyproject.toml.
variable "VERSION" {
  default = "0.1.0"
}

# Revision label: the commit that the images are built from.
variable "REVISION" {
  default = "unknown"
}

group "default" {
  targets = ["worker", "worker-cuda", "aggregator", "components"]
}

target "common" {
  context    = "."
  dockerfile = "images/Dockerfile"
  args = {
    VERSION  = VERSION
    REVISION = REVISION
  }
}

target "worker" {
  inherits = ["common"]
  target   = "worker"
  tags     = ["${REGISTRY}fedloom/worker:${VERSION}"]
}

target "worker-cuda" {
  inherits  = ["common"]
  target    = "worker"
  tags      = ["${REGISTRY}fedloom/worker-cuda:${VERSION}"]
  platforms = ["linux/amd64"]
  args = {
    TORCH_INDEX = ""
  }
  labels = {
    "org.opencontainers.image.title" = "FedLoom worker, CUDA"
  }
}

target "aggregator" {
  inherits = ["common"]
  target   = "aggregator"
  tags     = ["${REGISTRY}fedloom/aggregator:${VERSION}"]
}

target "components" {
  inherits = ["common"]
  target   = "components"
  tags     = ["${REGISTRY}fedloom/components:${VERSION}"]
}
