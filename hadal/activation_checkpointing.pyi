from hadal.plugins.activation_checkpointing import *
