from hadal.plugins.sequence import *
