"""Features of their own: each folder serves sections of the configuration, or stands alone.

A plugin knows `comm`, `device`, `config` and the seams `listener` and `order`, but no other plugin;
the engine assembles them. Programs import them without this folder's name (`hadal.moe.MoE`).
"""
