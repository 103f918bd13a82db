"""The job that shows that it works: a tiny model learns to sort digits, or SmolLM2 runs on reasoning-gym.

args -> run -> RolloutEngine -> Batch -> recipe -> update_weights
         |-> display (what happens now), record (what happened)
tasks: rows, rewards, tokenizer      models: checkpoints, made once and cached      controls: what must not learn
"""
