#!/usr/bin/env bash
# Everything that needs a GPU, on one of them, within SECONDS (default 400): the tests side by side, then benchmarks.
#
#     bash benchmarks/one_gpu.sh OUT [SECONDS]             # both
#     PARTS=tests bash benchmarks/one_gpu.sh OUT           # or PARTS=benchmarks
#     DEVICE=cpu bash benchmarks/one_gpu.sh OUT            # a rehearsal: tests are skipped, benchmarks are tiny
#
# OUT gets a text file for each part as it runs, log.txt and failed.txt. Three copies of the package with a wait left out
# of their copies between host and device must fail in tests/gpu/test_streams.py: mutant-*.txt. Python is $PYTHON
# (python3), with the package's requirements, pytest, and DeepSpeed for its lines.
set -u
begin=$SECONDS out=$(mkdir -p "$1" && cd "$1" && pwd) limit=${2:-400}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) python=${PYTHON:-python3} device=${DEVICE:-cuda} parts=${PARTS:-all}
work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT
path=${PYTHONPATH:+:$PYTHONPATH}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=$root$path

say() { echo "[$((SECONDS - begin)) s] $*" | tee -a "$out/log.txt"; }

part() { # NAME SECONDS COMMAND...: runs in $in, for at most so long and not past the limit
  local name=$1 most=$2 room=$((limit - SECONDS + begin)) start=$SECONDS
  shift 2
  ((room < most)) && most=$room
  if ((most < 8)); then say "$name: no time" && return; fi
  (cd "${in:-$root}" && timeout -s INT -k 5 "$most" "$@") >"$out/$name.txt" 2>&1
  say "$name: status $? in $((SECONDS - start)) s: $(tail -1 "$out/$name.txt" | cut -c1-200)"
}

mutant() { # NUMBER FILE TEXT TESTS: runs the tests without the line of the text
  local copy=$work/mutant-$1
  mkdir -p "$copy" && cp -r "$root"/{zerolite,tests,csrc,op_builder,pyproject.toml} "$copy"
  grep -qF "$3" "$copy/zerolite/$2" || say "mutant-$1: $2 has no line with $3"
  sed -i "s/^\( *\)\(.*$3\)/\1pass  # \2/" "$copy/zerolite/$2"
  in=$copy PYTHONPATH=$copy$path part "mutant-$1" 140 "${test[@]}" -x tests/gpu/test_streams.py -k "$4" &
}

run_tests() {
  local -x OMP_NUM_THREADS=2
  local nvrtc="cuda_kernels_nvrtc" streams="test_every_placement and [1-fp32 and host"
  part report 100 "$python" -m zerolite.diagnostics.report --build &
  part test-kernels 140 "${test[@]}" tests/gpu/test_kernels.py -k "not $nvrtc" &
  part test-kernels-nvrtc 140 "${test[@]}" tests/gpu/test_kernels.py -k "$nvrtc" &
  part test-one-rank 140 "${test[@]}" tests/gpu/test_single_device.py -k "not [2-" &
  part test-two-ranks 140 "${test[@]}" tests/gpu/test_single_device.py tests/gpu/test_sync_batchnorm.py \
    -k "[2- or batchnorm" &
  for ranks in 1 2; do
    for dtype in fp32 bf16; do
      part "test-streams-$ranks-$dtype" 140 "${test[@]}" tests/gpu/test_streams.py -k "[$ranks-$dtype" &
    done
  done
  part test-loops 140 "${test[@]}" tests/gpu/test_loops.py &
  part test-plan 140 "${test[@]}" tests/planning/test_on_gpu.py tests/distributed/test_monitor.py &
  mutant 1 offload/transfers.py 'stream.wait_stream(torch.cuda.current_stream' "$streams"
  mutant 2 offload/transfers.py 'current_stream(self._stream.device).wait_event' "$streams"
  mutant 3 activation_checkpointing/saved_inputs.py 'current_stream(self._device).wait_event' \
    "test_checkpointed_layers and [1-fp32 and host"
  wait
  cat "$out"/test-*.txt | grep -E '^(FAILED|ERROR)' >"$out/failed.txt"
  say "failed tests: $(wc -l <"$out/failed.txt")"
}

run_benchmarks() {
  local ours=compute,zerolite-0,zerolite-1,zerolite-2,zerolite-3,zerolite-3-reshard
  local theirs=deepspeed-1,deepspeed-2,deepspeed-3 gpt=(--vocab 50304 --context 1024 --micro-batch 8)
  local small=(--layers 12 --width 768 --heads 12) large=(--layers 24 --width 2048 --heads 16)
  local llama=1b short=32768 long=131072 numel=500000000
  if [[ $device == cpu ]]; then
    gpt=() small=(--layers 2 --width 64 --heads 2) large=(--layers 2 --width 64 --heads 2)
    llama=tiny short=256 long=512 numel=1000
  fi
  local compare=("$python" benchmarks/compare.py --device "$device" --nproc 1 --dtype bf16 --markdown "${gpt[@]}")
  local sequence=("$python" benchmarks/long_sequence.py --device "$device" --size $llama)
  local adam=("$python" benchmarks/adam.py --device "$device" --rounds 5 --markdown)
  part compare-small 120 "${compare[@]}" "${small[@]}" --no-restart --rounds 3 --steps 10 \
    --json "$out/compare-small.json" --competitors "$ours,ddp,fsdp2,$theirs"
  part compare-large 90 "${compare[@]}" "${large[@]}" --rounds 1 --steps 10 --json "$out/compare-large.json" \
    --competitors "$ours,ddp,fsdp2"
  part compare-large-peers 80 "${compare[@]}" "${large[@]}" --rounds 1 --steps 8 \
    --json "$out/compare-large-peers.json" --competitors "compute,$theirs,zerolite-2-host,zerolite-3-host-all"
  part sequence-short 60 "${sequence[@]}" --lengths $short --offload none,all --steps 2
  part adam-tensors 30 "${adam[@]}" --sections tensors
  part sequence-long 70 "${sequence[@]}" --lengths $long --offload all --steps 1
  part adam 90 "${adam[@]}" --numel $numel --sections fp32,bf16,norm # DeepSpeed compiles its own first
}

test=("$python" -m pytest -q -p no:cacheprovider --tb=short -m gpu)
(cd "$root" && "$python" -c 'import torch; print(torch.__version__, torch.version.cuda)'
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader) 2>&1 | tee "$out/machine.txt"
[[ $parts == benchmarks ]] || run_tests
[[ $parts == tests ]] || run_benchmarks
[[ ! -s $out/failed.txt ]] || head -60 "$out/failed.txt" | cut -c1-250
for name in compare-small compare-large compare-large-peers sequence-short sequence-long adam-tensors adam; do
  [[ ! -f $out/$name.txt ]] || { echo "$name" && grep -E '^[|{]|DISAGREE|Error' "$out/$name.txt" | cut -c1-230; }
done
