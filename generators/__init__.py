ENGINES = ("auto", "torch", "compiled", "fused")
"""Names of engines (generators.engines.make_engine); here, where naming one does not import torch."""
