#!/usr/bin/env bash
# A Cloud TPU from nothing to a finished run. In the environment: NAME, ZONE, TYPE (v5litepod-8, v5p-64), RUNTIME,
# NFS (ADDRESS:/SHARE), and SPOT=yes for spot capacity. From the repository's root:
#   bash docs/cloud/tpu_vm.sh create | install | train CONFIG [--field value ...] | log | stop | delete
#   bash docs/cloud/tpu_vm.sh keep CONFIG [--field value ...]
# The last does all of it up to train, and again when the TPU is taken away or a process dies, until the run ends with
# 0, 2 or 3, at most 50 times.
set -euo pipefail
: "${NAME:?}" "${ZONE:?}" "${TYPE:?}" "${RUNTIME:?}" "${NFS:?}"

on() { # WORKER COMMAND
  gcloud compute tpus tpu-vm ssh "$NAME" --zone "$ZONE" --worker="$1" --command "$2"
}
state() {
  gcloud compute tpus queued-resources describe "$NAME" --zone "$ZONE" --format 'value(state.state)' 2> /dev/null || true
}
code() { on 0 'cat ~/exit_code' 2> /dev/null || true; }

case "$1" in
  create)
    gcloud compute tpus queued-resources create "$NAME" --node-id "$NAME" --zone "$ZONE" \
      --accelerator-type "$TYPE" --runtime-version "$RUNTIME" ${SPOT:+--spot}
    until [ "$(state)" = ACTIVE ]; do
      [ "$(state)" != FAILED ]
      sleep "${POLL:-60}"
    done
    ;;
  install)
    on all 'rm -rf ~/source && mkdir ~/source'
    gcloud compute tpus tpu-vm scp --recurse pyproject.toml setup.py README.md LICENSE configs jaxrl_llm \
      "$NAME:source/" --zone "$ZONE" --worker=all
    on all "sudo apt-get update -qq && sudo apt-get install -qq -y nfs-common tmux && sudo mkdir -p /shared &&
      { mountpoint -q /shared || sudo mount -t nfs $NFS /shared; } && sudo chmod 1777 /shared &&
      python3 -m pip install -q --user uv && ~/.local/bin/uv venv -q --clear --python 3.12 ~/env &&
      cd ~/source && ~/.local/bin/uv pip install -q --python ~/env '.[tpu]'"
    ;;
  train)
    on all "rm -f ~/exit_code; tmux new-session -d -s train 'export HF_HOME=/shared/huggingface;
      export JAX_COMPILATION_CACHE_DIR=/shared/compiled; ~/env/bin/jaxrl-llm train ${*:2} 2>&1 |
      tee -i -a ~/train.log; echo \${PIPESTATUS[0]} > ~/exit_code'"
    ;;
  log) on 0 'tail -n 50 -F ~/train.log' ;;
  stop) on 0 'tmux send-keys -t train C-c' ;;
  delete) gcloud compute tpus queued-resources delete "$NAME" --zone "$ZONE" --force --quiet ;;
  keep)
    for _ in {1..50}; do
      if [ "$(state)" != ACTIVE ]; then
        bash "$0" delete || true # there is none at first
        bash "$0" create
        bash "$0" install
      fi
      bash "$0" train "${@:2}"
      while [ "$(state)" = ACTIVE ] && [ -z "$(code)" ]; do sleep "${POLL:-60}"; done
      [[ "$(code)" =~ ^[023]$ ]] && break
    done
    ;;
  *) echo "no such command: $1" >&2 && exit 2 ;;
esac
