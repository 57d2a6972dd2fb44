"""Examines this machine and its processes from outside: do they live, and is anything wrong?"""
