"""What actor and learner share: the tiny transformer, its tokens and its checkpoints."""
