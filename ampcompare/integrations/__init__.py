"""Parts of ampcompare that plug into trainers: `integrations.lightning` and `integrations.transformers`.

Each module imports its library, and only that.
"""
