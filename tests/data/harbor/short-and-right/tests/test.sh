#!/bin/bash
# Two rewards; the code under test runs in a process of its own and only its output is read.
cd /app
out=$(timeout 20 python3 -c 'from primes import primes; print(primes(60))' 2>/dev/null)
right=0
[ "$out" = "[2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59]" ] && right=1
short=0
[ "$right" = 1 ] && [ "$(wc -l < primes.py)" -le 10 ] && short=1
echo "{\"right\": $right, \"short\": $short}" > /logs/verifier/reward.json
