output "balancer_dns_name" {
  description = "Point the certificate's name here (a CNAME or an alias record)."
  value       = aws_lb.this.dns_name
}

output "prometheus_endpoint" {
  description = "For Grafana's data source, with SigV4."
  value       = aws_prometheus_workspace.this.prometheus_endpoint
}

output "alarm_topic_arn" {
  description = "Subscribe whoever must know."
  value       = aws_sns_topic.alarms.arn
}
