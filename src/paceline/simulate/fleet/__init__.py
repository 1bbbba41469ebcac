"""Many replicas on one virtual timeline: routers, prefill and decode pools, KV tiers, failures, prices.

timeline.py     what happens when: a heap of (time, sequence)
blueprint.py    what a replica is made of
member.py       one replica's life in the fleet: cold start, up, down, up again
journey.py      one request's way through the fleet, to exactly one end
fleet.py        the loop: arrivals to routers, turns of replicas, ends to clients
handoff.py      prefill here, decode there: the KV travels over a link
tiers.py        KV that is kept outside the GPU: reload it, or compute it again
speculation.py  a backend that drafts and verifies
faults.py       outages, planned or drawn
report.py       what the run cost, and where its time went
"""
