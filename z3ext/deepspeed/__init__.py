"""The only package that imports DeepSpeed: plugs the reducer into the ZeRO stage 3 optimizer."""
