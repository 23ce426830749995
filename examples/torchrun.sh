#!/usr/bin/env bash
# One process a GPU by torchrun. On several machines run it on each of them, with the first one's name in MASTER_ADDR.
#   examples/torchrun.sh --config configs/paper/qwen3-8b.yaml
#   NODES=4 MASTER_ADDR=node0 examples/torchrun.sh --config configs/paper/qwen3-30b-a3b.yaml
set -euo pipefail
nodes=${NODES:-1} gpus=${GPUS:-8}
exec torchrun --nnodes "$nodes" --nproc_per_node "$gpus" \
    --rdzv_backend c10d --rdzv_endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}" \
    -m dclightning fit "$@" --trainer.num_nodes "$nodes" --trainer.devices "$gpus"
